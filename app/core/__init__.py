"""The words that every other package uses: tensors, models, inferences, deadlines, errors, the port to an engine.

Everything here may be imported from anywhere, and nothing here knows HTTP or gRPC. Begin with `inference.py`,
then `engine.py` and `errors.py`.
"""
