"""The engine over gRPC: the only package that imports grpc and tritonclient.

Only `app/process` and `app/check.py` import it; others use `app/core/engine.py`. Begin with
`triton_engine.py`, then `codec.py` and `grpc_errors.py`.
"""
