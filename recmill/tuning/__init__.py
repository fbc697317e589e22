"""Chooses the number of workers per ingestion stage (InTune).

`allocation` measures and writes an allocation, `online` adjusts it during training, the agent learns in `simulation`.
"""

__all__ = [
    "agent",
    "allocation",
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
