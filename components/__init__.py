"""The steps of the pipeline: one folder per step, each a thin wrapper that calls recmill.

A component reads references to its inputs, calls one function of recmill inside `step_run`, and publishes references to
its outputs. Imports stand in the body because Kubeflow Pipelines ships the function's source alone. Steps never import
one another; what the trainings share is in train_model/step.py.
"""
