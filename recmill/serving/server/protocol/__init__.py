"""The Open Inference Protocol through KServe: the only modules that import it.

`model` is KServe's view of the model, `plane` its operations, `rest` and `remote` (gRPC) the two servers, `metrics` what
Prometheus reads.
"""
