"""The presets of LLM backends, in the words of ``gateway.yaml``. ``app/pipelines/file.py`` reads them.

``inputs`` and ``outputs`` are the tensors by which a backend is recognized. ``only_decoupled`` are the parameters that
a model without streams must not be sent. ``accumulates_if`` is the parameter of the configuration that says whether
each response repeats the text so far. ``body_bytes_by_input`` are limits of bodies for models that have these inputs.
"""
