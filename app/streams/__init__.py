"""Streams: numbered events, the terminal event, cancellation, and the stores of resumable streams."""
