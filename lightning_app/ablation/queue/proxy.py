"""Optuna's gRPC proxy in front of a database, with what supervisors need besides.

Optuna's proxy passes no heartbeats on and reports a lost database as an unknown error. Here
heartbeats travel as attributes with reserved names, which never reach the database, and a lost
database is UNAVAILABLE, as a lost proxy is.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from optuna.storages import BaseStorage, GrpcStorageProxy
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages._grpc.auto_generated import api_pb2_grpc
from optuna.storages._grpc.servicer import OptunaStorageProxyService
from optuna.storages._heartbeat import BaseHeartbeat

_BEAT = "ablate:heartbeat"
_STALE = "ablate:stale"
_LOST_AFTER = "ablate:lost_after"
_NO_STUDY = 0  # databases count from 1
_THREADS = 10


class HeartbeatProxy(GrpcStorageProxy, BaseHeartbeat):
    """A client of `HeartbeatServer` to which Optuna's heartbeat functions apply."""

    lost_after: int  # seconds, as the server says

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host=host, port=port)

    def ask_lost_after(self) -> int:
        """Ask after how many seconds without a heartbeat the server gives a trial up.

        Raises:
            KeyError: where the server is another program's.
        """
        return self.get_study_system_attrs(_NO_STUDY)[_LOST_AFTER]

    def record_heartbeat(self, trial_id: int) -> None:
        self.set_trial_system_attr(trial_id, _BEAT, True)

    def get_heartbeat_interval(self) -> int | None:
        return max(1, self.lost_after // 4)

    def get_heartbeat_stale_trial_callback(self) -> None:
        return None

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        return self.get_study_system_attrs(study_id)[_STALE]


class HeartbeatServer(_CachedStorage):
    """A database as the proxy serves it."""

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        if key == _BEAT:
            self.record_heartbeat(trial_id)
        else:
            super().set_trial_system_attr(trial_id, key, value)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        if study_id == _NO_STUDY:
            self._backend.get_current_version()  # is the database there?
            return {_LOST_AFTER: self._backend.grace_period}
        stale = self._get_stale_trial_ids(study_id)
        return {**super().get_study_system_attrs(study_id), _STALE: stale}


class _Outages(grpc.ServerInterceptor):
    """Report a lost database as UNAVAILABLE."""

    def __init__(self, is_outage: Callable[[BaseException], bool]) -> None:
        self._is_outage = is_outage

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return handler.unary_unary(request, context)
            except Exception as error:
                if not self._is_outage(error):
                    raise
                context.abort(grpc.StatusCode.UNAVAILABLE, "the proxy has lost its database")

        return grpc.unary_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )


def make_server(
    storage: BaseStorage, host: str, port: int, is_outage: Callable[[BaseException], bool]
) -> tuple[grpc.Server, int]:
    """Return a server of `storage`, not started yet, and the port it will listen on."""
    server = grpc.server(
        ThreadPoolExecutor(_THREADS),
        interceptors=[_Outages(is_outage)],
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)],
    )
    api_pb2_grpc.add_StorageServiceServicer_to_server(OptunaStorageProxyService(storage), server)
    return server, server.add_insecure_port(f"{host}:{port}")
