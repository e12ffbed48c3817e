"""Silero VAD on onnxruntime: the probability of speech for each chunk of 512 samples.

The package's own code would need PyTorch and is not used; its ``data`` folder is.
"""

from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import onnxruntime
from model_kit.pcm import Frames

from .speech_segments import CHUNK_SAMPLES, SpeechSegments

PACKAGE = "silero-vad"
# This form of the network reads all chunks of a step in one run; the result is that of a run for each chunk.
WEIGHTS = "silero_vad/data/silero_vad_16k_sequence.onnx"
CONTEXT_SAMPLES = 64
STATE_SHAPE = (1, 1, 128)
SAMPLE_RANGE = np.float32(32_768)


class VoiceNetwork:
    """The weights, which all sequences share."""

    def __init__(self):
        options = onnxruntime.SessionOptions()
        options.inter_op_num_threads = options.intra_op_num_threads = 1
        weights = Path(str(distribution(PACKAGE).locate_file(WEIGHTS)))
        self._session = onnxruntime.InferenceSession(str(weights), options, providers=["CPUExecutionProvider"])

    def run(self, chunks, hidden, cell):
        """Chunks [n, 576], each with the 64 samples before it -> probabilities [n], and the next states."""
        named = {"input": chunks, "h": hidden, "c": cell}
        probabilities, hidden, cell = self._session.run(["speech_probs", "hn", "cn"], named)
        return probabilities.reshape(-1), hidden, cell


class Voice:
    """The state of one sequence: the network's memory, the last samples, and the segments."""

    def __init__(self, network):
        self._network = network
        self._frames = Frames(CHUNK_SAMPLES)
        self._context = np.zeros((1, CONTEXT_SAMPLES), np.float32)
        self._hidden = self._cell = np.zeros(STATE_SHAPE, np.float32)
        self._segments = SpeechSegments()

    @property
    def segments(self):
        """Start and end in seconds, float32 [n, 2]."""
        return self._segments.as_array()

    def hear(self, audio, *, ends):
        """Returns the probabilities, float32 [n], of the chunks that this step completes."""
        pcm = self._frames.whole(audio)
        if ends:
            pcm += self._frames.last()
        probabilities = self._probabilities_of(np.frombuffer(pcm, "<i2").reshape(-1, CHUNK_SAMPLES))
        self._segments.add(probabilities)
        if ends:
            self._segments.end()
        return probabilities

    def _probabilities_of(self, samples):
        if not len(samples):
            return np.empty(0, np.float32)
        chunks = samples / SAMPLE_RANGE
        contexts = np.concatenate([self._context, chunks[:, -CONTEXT_SAMPLES:]])
        self._context = contexts[-1:]
        inputs = np.concatenate([contexts[:-1], chunks], axis=1)
        probabilities, self._hidden, self._cell = self._network.run(inputs, self._hidden, self._cell)
        return probabilities
