"""Sessions: each is one sequence of a stateful model in Triton, whose steps run in order, one at a time.

Nothing here knows HTTP or pipelines. `session.py` has a session, and what gateway.yaml and the models say about
sessions. `app/api/sessions` opens them and runs their steps.
"""
