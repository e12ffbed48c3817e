"""OpenAI's dialect: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/embeddings``.

It serves the pipelines that declare ``openai:``. The model's id is the pipeline's name.
`routes.py` has the dialect and its routes: begin there.
"""
