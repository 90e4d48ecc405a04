"""Private servers under a folder of ours: RabbitMQ and Valkey, each with its own ports, secrets and data."""

from compose.servers.ports import PortBook
from compose.servers.process import Process
from compose.servers.rabbitmq import RabbitMQ
from compose.servers.server import Server
from compose.servers.service import Service
from compose.servers.valkey import Valkey
from compose.servers.valkey_cluster import ValkeyCluster
from compose.servers.valkey_sentinel import ValkeySentinel

__all__ = ["PortBook", "Process", "RabbitMQ", "Server", "Service", "Valkey", "ValkeyCluster", "ValkeySentinel"]
