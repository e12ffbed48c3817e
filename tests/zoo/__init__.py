"""Stand-ins for the kinds of models that Tritons serve, and every way to call them, compared with Triton's own gRPC.

`kinds.py` is the table of the kinds: a new kind is one row. `model.py` is the stand-in that Triton runs for each of
them, and `test_zoo.py` calls them. Sizes, counts and values are random: `ZOO_SEED` repeats a run.
"""
