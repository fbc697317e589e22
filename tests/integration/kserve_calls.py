"""Asks a server through KServe's own clients; runs in the server's environment: python kserve_calls.py REST GRPC.

Prints one JSON object: what the server says about itself, and the same two requests' scores by every way.
"""

import asyncio
import json
import sys

import numpy as np


def tensors(kserve, *, binary):
    given = {
        "candidates": ("INT64", np.array([2, 1], np.int64)),
        "age": ("FP32", np.array([30, 40], np.float32)),
        "price": ("FP32", np.array([1, 2, 3], np.float32)),
        "item": ("BYTES", np.array([b"sku-1", b"sku-2", b"sku-99"], np.object_)),
        "seen": ("BYTES", np.array([b"sku-3", b"sku-4"], np.object_)),
        "seen.lengths": ("INT64", np.array([2, 0], np.int64)),
    }
    found = []
    for name, (kind, values) in given.items():
        tensor = kserve.InferInput(name=name, shape=list(values.shape), datatype=kind)
        tensor.set_data_from_numpy(values, binary_data=binary)
        found.append(tensor)
    return found


async def ask(rest, grpc):
    import kserve

    async def infer(client, address, *, binary):
        request = kserve.InferRequest(model_name="recmill", infer_inputs=tensors(kserve, binary=binary))
        if address:
            answer = await client.infer(address, request, model_name="recmill")
        else:
            answer = await client.infer(request)
        return {"version": answer.model_version, "scores": answer.outputs[0].as_numpy().tolist()}

    web = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2", timeout=20))
    found = {
        "live": await web.is_server_live(rest),
        "ready": await web.is_server_ready(rest),
        "model_ready": await web.is_model_ready(rest, "recmill"),
        "rest": await infer(web, rest, binary=False),
        "rest_binary": await infer(web, rest, binary=True),
    }
    await web.close()
    if grpc != "none":
        remote = kserve.InferenceGRPCClient(url=grpc, timeout=20)
        found["grpc_live"] = await remote.is_server_live()
        found["grpc_model_ready"] = await remote.is_model_ready("recmill")
        found["grpc"] = await infer(remote, None, binary=True)
        found["grpc_contents"] = await infer(remote, None, binary=False)
        try:
            wrong = [kserve.InferInput(name="prise", shape=[1], datatype="FP32", data=[1.0])]
            await remote.infer(kserve.InferRequest(model_name="recmill", infer_inputs=wrong))
        except Exception as error:  # noqa: BLE001
            found["grpc_refusal"] = [str(error.code()), error.details()]
        await remote.close()
    return found


if __name__ == "__main__":
    addresses = sys.argv[1:3]
    sys.argv = sys.argv[:1]  # kserve parses arguments when it is imported
    print(json.dumps(asyncio.run(ask(*addresses))))
