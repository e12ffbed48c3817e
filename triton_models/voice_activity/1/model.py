"""AUDIO of a step -> SPEECH, SEGMENTS, and GOOD_AUDIO if it is requested."""

from model_kit.pcm import audio_of
from model_kit.sequences import Limits, Sequences, step_of
from model_kit.serving import answer_each, bytes_tensor, input_of

from .voice import Voice, VoiceNetwork


class TritonPythonModel:
    def initialize(self, args):
        network = VoiceNetwork()
        self._sequences = Sequences(Limits.of(args), lambda: Voice(network))

    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        step = step_of(lambda name: input_of(request, name))
        with self._sequences.state_of(step) as voice:
            audio = audio_of(input_of(request, "AUDIO"))
            outputs = {"SPEECH": voice.hear(audio, ends=step.ends), "SEGMENTS": voice.segments}
        if "GOOD_AUDIO" in request.requested_output_names():
            outputs["GOOD_AUDIO"] = bytes_tensor([audio], [1])
        return outputs
