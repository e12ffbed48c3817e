"""The domain: tensors, models, inferences, deadlines, errors. Independent of HTTP and gRPC."""
