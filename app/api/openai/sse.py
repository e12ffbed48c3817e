"""The events of a stream as OpenAI's clients read them: chunks, and ``[DONE]`` or an error at the end."""

from sse_starlette import ServerSentEvent

from app.api.streaming import StreamResponse
from app.streams.event import Event

_FRAME = ServerSentEvent("%b", sep="\n").encode()
_DONE = ServerSentEvent("[DONE]", sep="\n").encode()


class ChunkResponse(StreamResponse):
    @staticmethod
    def frame_of(event: Event) -> bytes:
        """Without ids and names: OpenAI's clients know neither. An error is an object with the one key ``error``."""
        return _DONE if event.name == "done" else _FRAME % event.data
