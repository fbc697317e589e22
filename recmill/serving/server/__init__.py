"""`recmill serve`: the Open Inference Protocol v2, REST and gRPC, in front of a request model.

    a request        REST or gRPC -> KServe's endpoints (`protocol`)
      -> `tensors`   named tensors, or plain JSON (`instances`), checked: one sentence per mistake
      -> `ids`       values as the user knows them to rows of tables
      -> `batcher`   waits for the scorer with others, in a bounded queue
      -> `versions`  the model that is served now; a new one is loaded beside it

`rollout` puts versions into the folder that servers watch. `process` wires the server up; it runs in an environment of
its own (`environment`), because KServe's pins of pandas and psutil do not fit those of the rest. Only `protocol`
imports KServe: all other modules run, and are tested, without it.
"""
