"""Counts the tokens of one answer from the tensors that ``usage`` names."""

from app.domain.inference import InferenceResponse
from app.pipelines.openai.spec import UsageSpec

Usage = dict[str, int]


class TokenCount:
    """``prompt_tokens`` is the value of its tensor; ``completion_tokens`` is the number of elements of its tensor."""

    def __init__(self, spec: UsageSpec | None) -> None:
        self._spec = spec
        self._prompt = 0
        self._completion = 0

    def add(self, response: InferenceResponse) -> None:
        if self._spec is None:
            return
        prompt = response.outputs.get(self._spec.prompt_tokens)
        if prompt is not None and prompt.array.size:
            self._prompt = int(prompt.array.flat[0])
        written = response.outputs.get(self._spec.completion_tokens or "")
        if written is not None:
            self._completion += written.array.size

    @property
    def usage(self) -> Usage | None:
        """None if the pipeline does not count tokens."""
        if self._spec is None:
            return None
        total = self._prompt + self._completion
        return {"prompt_tokens": self._prompt, "completion_tokens": self._completion, "total_tokens": total}
