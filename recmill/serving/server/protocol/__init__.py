"""The Open Inference Protocol through KServe: the only modules that import it.

`model` is the model as KServe sees it, `plane` its operations, `rest` and `remote` (gRPC) are the servers, `metrics` is
what Prometheus reads.
"""
