"""The events of a stream."""

from app.domain.json_schema import Schema, enum_of

_TEXT: Schema = {"type": "string"}
DONE: Schema = {
    "type": "object",
    "description": "The data of the event `done`",
    "required": ["reason", "early_exit", "outputs", "request_id"],
    "properties": {
        "reason": enum_of(["complete", "early_exit"]),
        "early_exit": {"type": ["string", "null"]},
        "outputs": {"type": "integer", "minimum": 0},
        "request_id": _TEXT,
    },
}


def event_stream(output: Schema) -> Schema:
    """Describes a stream as text with ``x-event-schemas``, because OpenAPI 3.1 cannot type the events of a stream.

    ``output``: the schema of the data of an ``output`` event.
    """
    return {
        "text/event-stream": {
            "schema": {"type": "string", "description": "Server-Sent Events. The data of each event is JSON."},
            "x-event-schemas": {
                "output": output,
                "done": {"$ref": "#/components/schemas/Done"},
                "error": {"$ref": "#/components/schemas/Problem"},
            },
        }
    }
