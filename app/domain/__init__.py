"""What the gateway talks about: tensors, models, inferences, deadlines, errors. Knows no HTTP and no gRPC."""
