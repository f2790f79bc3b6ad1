# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Meets at the registry of the data service by each of its addresses."""

from farandole.tensorflow.data._registry import (
    DataServiceRegistryClient,
    DataServiceRegistryServer,
    local_host_addresses,
)

server = DataServiceRegistryServer(1, 1)
print(" ".join(local_host_addresses()), flush=True)
for address in server.listen_addresses:
    client = DataServiceRegistryClient([address], server.key, 20.0)
    client.register_dispatcher(0, "grpc://x:1")
    assert client.wait_for_dispatcher_registration(0) == "grpc://x:1"
    print(client.local_host(), flush=True)
server.close()
