"""A KV connector of vLLM's whose two halves shake hands, as those for transfers between machines do, for vllm_connector_test.py."""

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


@dataclasses.dataclass
class Address(KVConnectorHandshakeMetadata):
    port: int


class HandshakeConnector(ExampleConnector):
    def get_handshake_metadata(self):
        return Address(5600)

    def set_xfer_handshake_metadata(self, metadata):
        assert {rank: address.port for rank, address in metadata.items()} == {0: 5600}
