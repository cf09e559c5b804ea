"""EmberKV's client: what an inference engine uses to keep and find KV blocks."""

from client_sdk.async_client import AsyncClient, AsyncLease, AsyncStagedWrite
from client_sdk.attached_pool import AttachedPool
from client_sdk.connection import ClientCounters
from client_sdk.paged import gather_from_pages, scatter_into_pages
from client_sdk.patience import Patience
from client_sdk.prefetch import AsyncPrefetch, Prefetch
from client_sdk.put_pipeline import PutResult
from client_sdk.status import NodeStatus, TierStatus
from client_sdk.sync_borrowed import Lease, StagedWrite
from client_sdk.sync_client import OperatorClient, ProbeResult, SyncClient

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "AsyncPrefetch",
    "AsyncStagedWrite",
    "AttachedPool",
    "ClientCounters",
    "Lease",
    "NodeStatus",
    "OperatorClient",
    "Patience",
    "Prefetch",
    "ProbeResult",
    "PutResult",
    "StagedWrite",
    "SyncClient",
    "TierStatus",
    "gather_from_pages",
    "scatter_into_pages",
]
