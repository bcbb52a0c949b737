import numpy as np

import kvpool

layout = kvpool.Layout.paged(layers=4, kv_heads=2, head_dim=64, tokens_per_block=16, dtype="float32")
with kvpool.Session(layout, "my-model-v1") as session:
    keys = session.hasher().chain(range(1024), 16)
    with session.match(keys).wait() as hit:
        found = len(hit.blocks)
        print(found, "of", len(keys), "blocks were cached")
        if found < len(keys):
            with session.lease(len(keys) - found) as blocks:
                for i in range(len(blocks)):  # The model writes K and V in place.
                    np.asarray(blocks.k(i))[:] = np.asarray(blocks.v(i))[:] = i
                session.seal(blocks, keys[found:], parent_key=keys[found - 1] if found else None).wait()
