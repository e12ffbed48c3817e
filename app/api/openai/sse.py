"""The events of a stream in OpenAI's format: chunks, and ``[DONE]`` or an error at the end."""

from sse_starlette import ServerSentEvent

from app.api.streaming import StreamResponse
from app.streams.event import Event

_FRAME = ServerSentEvent("%b", sep="\n").encode()
_DONE = ServerSentEvent("[DONE]", sep="\n").encode()


class ChunkResponse(StreamResponse):
    @staticmethod
    def frame_of(event: Event) -> bytes:
        """Events have no ids and names, because OpenAI's clients use neither. An error has the single key ``error``."""
        return _DONE if event.name == "done" else _FRAME % event.data
