"""What is wrong with a model repository and gateway.yaml, said before Triton or a request does; pure."""
