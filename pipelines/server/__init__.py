"""A Kubeflow Pipelines server as a user meets it: submit a pipeline, follow its run, come back to it later.

The server's API names the workflow engine's nodes and gives no reasons; `tasks` and `following` turn that into the
pipeline's own steps, with the sentences that steps print to their logs.
"""
