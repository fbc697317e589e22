"""Chooses the number of workers per ingestion stage (InTune).

`allocation` measures and writes an allocation, `online` adjusts it during training, the agent learns in `simulation`;
`controllers` and `programme` are the rules that it is compared with.
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
    "pretraining",
    "programme",
    "residual",
    "simulation",
]
