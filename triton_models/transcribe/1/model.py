"""AUDIO of a step -> TEXT and PARTIAL."""

from model_kit.pcm import audio_of
from model_kit.sequences import Limits, Sequences, step_of
from model_kit.serving import answer_each, bytes_tensor, input_of


class TritonPythonModel:
    def initialize(self, args):
        self._sequences = Sequences(Limits.of(args), _new_transcript)

    def execute(self, requests):
        return answer_each(requests, self._answer)

    def _answer(self, request):
        step = step_of(lambda name: input_of(request, name))
        with self._sequences.state_of(step) as transcript:
            transcript.hear(audio_of(input_of(request, "AUDIO")), ends=step.ends)
            return {"TEXT": _tensor(transcript.text), "PARTIAL": _tensor(transcript.partial)}


def _new_transcript():
    # Imported here so that Triton also starts on a machine for which PocketSphinx has no wheel.
    from .transcript import Transcript  # noqa: PLC0415

    return Transcript()


def _tensor(text):
    return bytes_tensor([text.encode()], [1])
