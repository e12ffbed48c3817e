"""The life of one stream: numbering, the terminal event, cancellation."""
