"""How many workers each ingestion stage gets (InTune).

`allocation` measures and writes an allocation, `online` keeps adjusting it during training, `simulation` is where the
agent learns; `controllers` and `programme` are the rules it is compared with.
"""

__all__ = [
    "agent",
    "allocation",
    "controllers",
    "cores",
    "env",
    "guard",
    "measurement",
    "mlflow_writer",
    "online",
    "programme",
    "residual",
    "simulation",
]
