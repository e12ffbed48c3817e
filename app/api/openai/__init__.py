"""OpenAI's dialect: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/embeddings``.

It serves the pipelines that declare ``openai:``. The model's id is the pipeline's name.
`requests.py` has what all addresses share: begin there.
"""
