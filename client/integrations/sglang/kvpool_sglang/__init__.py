"""A storage backend for SGLang's HiCache: pages of its host memory are copied to a kvpoold and back.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvpool",
        "module_path": "kvpool_sglang", "class_name": "KvPoolStorage", "interface_v1": 1}'
"""

from kvpool_sglang.storage import KvPoolStorage

__all__ = ["KvPoolStorage"]
