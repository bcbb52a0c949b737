import numpy as np

import kvpool

layout = kvpool.Layout.paged(layers=4, kv_heads=2, head_dim=64, tokens_per_block=16, dtype="float32")
with kvpool.Session(layout, "my-model-v1") as session:
    keys = session.hasher().chain(range(1024), 16)
    with session.match(keys).wait() as hit:
        print(hit.tokens, "tokens were there")
        missing = keys[len(hit.blocks):]
    if missing:
        with session.lease(len(missing)) as blocks:
            for i in range(len(blocks)):
                np.asarray(blocks.k(i))[:] = np.asarray(blocks.v(i))[:] = i
            session.seal(blocks, missing).wait()
