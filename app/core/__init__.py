"""The words that every other package uses: tensors, models, inferences, deadlines, errors, the port to an engine.

Everything here may be imported from anywhere, and nothing here knows HTTP, gRPC or a file. Begin with `inference.py`,
then `engine.py` and `errors.py`.
"""
