"""Sessions: each is one sequence of a stateful model in Triton, whose steps run in order, one at a time.

Nothing here knows HTTP or pipelines. Begin with `session.py`; `places.py` counts the sessions, and `session_terms.py`
has what gateway.yaml and the models say about them. `app/api/sessions` opens them and runs their steps.
"""
