"""How an error of ours leaves a gRPC call: its code, its message and, as metadata, its type."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from client_sdk.index_client import ERROR_METADATA_KEY
from emberkv_proto.errors import EmberError

Context = grpc.aio.ServicerContext[Any, Any]
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


@asynccontextmanager
async def errors_answered(context: Context) -> AsyncIterator[None]:
    """Turn an EmberError of the body into the call's status. Other errors are gRPC's to log."""
    try:
        yield
    except EmberError as error:
        await context.abort(
            _STATUS_CODES[error.code],
            str(error),
            trailing_metadata=((ERROR_METADATA_KEY, type(error).__name__),),
        )
