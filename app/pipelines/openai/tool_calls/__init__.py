"""Reads tool calls and reasoning out of the text that a model writes, whole or as it grows.

``parser.py`` has the base class of the formats: begin there. ``formats.py`` makes the parser of a request. The parts of
an answer do not depend on where the text was cut.
"""
