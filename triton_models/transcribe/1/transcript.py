"""PocketSphinx: English speech -> text. The package contains the acoustic model, the dictionary and the language model.

An endpointer passes only speech to the decoder, and ends a phrase where the speaker pauses.
"""

from model_kit.pcm import BYTES_PER_SAMPLE, RATE_HZ, Frames
from pocketsphinx import Decoder, Endpointer, get_model_path

# A longer phrase is ended, because a decoder keeps the whole search of a phrase in memory.
MAX_PHRASE_S = 20
# The text of an answer is bounded; the oldest words are dropped.
MAX_TEXT_CHARACTERS = 20_000


class Transcript:
    """The state of one sequence. A used decoder would answer slightly differently, so each sequence has a new one."""

    def __init__(self):
        # Without the second pass, which takes more time than the first one and finds about as many words.
        self._decoder = Decoder(lm=get_model_path("en-us/en-us.lm.bin"), fwdflat=False, loglevel="FATAL")
        self._endpointer = Endpointer(sample_rate=RATE_HZ)
        self._frame_bytes = self._endpointer.frame_bytes
        self._frames = Frames(self._frame_bytes // BYTES_PER_SAMPLE)
        self._phrase_bytes = None
        self.text = ""

    @property
    def partial(self):
        """The words so far of the phrase that is being spoken."""
        return "" if self._phrase_bytes is None else self._words()

    def hear(self, audio, *, ends):
        """Reads the audio of a step. Ends the last phrase with the last step."""
        pcm = self._frames.whole(audio)
        for start in range(0, len(pcm), self._frame_bytes):
            self._hear_frame(pcm[start : start + self._frame_bytes])
        if ends:
            self._hear_last()

    def _hear_frame(self, frame):
        self._decode(self._endpointer.process(frame))
        if self._phrase_bytes is not None and not self._endpointer.in_speech:
            self._end_phrase()

    def _hear_last(self):
        """Gives the decoder the speech that the endpointer still holds. ``end_stream`` needs a frame."""
        frame = self._frames.last() or bytes(self._frame_bytes)
        self._decode(self._endpointer.end_stream(frame))
        if self._phrase_bytes is not None:
            self._end_phrase()

    def _decode(self, speech):
        if not speech:
            return
        if self._phrase_bytes is None:
            self._decoder.start_utt()
            self._phrase_bytes = 0
        self._decoder.process_raw(speech, False, False)
        self._phrase_bytes += len(speech)
        if self._phrase_bytes >= MAX_PHRASE_S * RATE_HZ * BYTES_PER_SAMPLE:
            self._end_phrase()

    def _end_phrase(self):
        self._decoder.end_utt()
        self._phrase_bytes = None
        self.text = f"{self.text} {self._words()}".strip()[-MAX_TEXT_CHARACTERS:]

    def _words(self):
        hypothesis = self._decoder.hyp()
        return hypothesis.hypstr if hypothesis else ""
