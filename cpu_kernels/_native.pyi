from typing import Any

def features() -> dict[str, bool]: ...
def isas() -> list[tuple[str, str, tuple[str, ...]]]: ...
def has_kernels(isa: str) -> bool: ...
def buffer_info(data: Any, writable: bool) -> tuple[int, tuple[int, ...], tuple[int, ...], str, int]: ...
def page_offsets(dtype: int, page_tokens: int, head_dim: int) -> tuple[int, int, int, int]: ...

class Pool:
    @staticmethod
    def paged(
        address: int, layers: int, pages: int, kv_heads: int, head_dim: int, dtype: int, page_tokens: int
    ) -> Pool: ...
    @staticmethod
    def token_major(
        k: list[int],
        v: list[int],
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: int,
        k_slot_bytes: int,
        v_slot_bytes: int,
    ) -> Pool: ...
    def write(self, isa: str, layer: int, places: Any, dtype: int, *rows: int) -> None: ...
    def read(self, isa: str, layer: int, places: Any, dtype: int, *rows: int) -> None: ...
    def copy(self, layer_begin: int, layer_end: int, source: Any, target: Any) -> None: ...

class PlanHandle:
    isa: str
    def __init__(
        self,
        pool: Pool,
        isa: str,
        lengths: Any,
        table: Any,
        table_begin: Any,
        q_heads: int,
        query_type: int,
        scale: float,
        soft_cap: float,
        window: int,
        threads: int,
        groups: Any,
        group_rows: Any,
        tuning: dict[str, int],
    ) -> None: ...
    def jobs(
        self,
        layers: Any,
        q: tuple[int, int, int],
        out: tuple[int, int, int],
        lse: tuple[int, int, int],
        k: tuple[int, int, int],
        v: tuple[int, int, int],
    ) -> PlanJobs: ...
    @property
    def items(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def units(self) -> int: ...
    @property
    def partials(self) -> int: ...
    @property
    def cost(self) -> tuple[int, int]: ...
    @property
    def shares(self) -> list[list[tuple[int, int]]]: ...
    def ran(self) -> set[str]: ...

class PlanJobs:
    keep: Any
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> PlanJob: ...
    def address(self, index: int) -> int: ...

class PlanJob:
    @property
    def address(self) -> int: ...
    def run(self, threads: int) -> None: ...
