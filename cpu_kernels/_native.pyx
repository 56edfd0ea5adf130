# cython: language_level=3
"""The compiled half of cpu_kernels: thin, validated calls into C++.

Addresses, sizes and strides come from Python already checked (see attention.py); what can make C++ read or write
outside its memory is checked here or in C++ again.
"""

from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
)
from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.vector cimport vector

cdef extern from "cpu_features.hpp" namespace "cpu_kernels" nogil:
    cdef struct Feature:
        const char* name
        bint present

    cdef struct Isa:
        const char* name
        const char* description
        const char* required

    size_t detect_features(Feature* out, size_t capacity)
    const Isa* isa_table(size_t* count)

cdef extern from "layout.hpp" namespace "cpu_kernels" nogil:
    cdef enum class Type(int):
        f32
        f16
        bf16
        i8

    cdef cppclass PageLayout:
        Type type
        int page_tokens
        int head_dim
        size_t row_bytes()
        size_t k_scale_offset()
        size_t v_offset()
        size_t v_scale_offset()
        size_t page_bytes()

    cdef cppclass KvPool:
        PageLayout layout
        int layers
        int64_t pages
        int kv_heads
        cbool slots
        uint8_t* base
        uint8_t** k
        uint8_t** v
        int64_t k_slot_bytes
        int64_t v_slot_bytes

cdef extern from "kernels.hpp" namespace "cpu_kernels" nogil:
    cdef cppclass Tuning:
        int prefetch_hint
        int prefetch_tiles
        int min_split_tokens
        int min_thread_tokens
        int last_round_tokens
        int prefix_min_rows
        int prefix_piece_kib
        int held_tiles
        int dot_min_queries
        int tile_min_queries
        int accurate_int8

    cdef struct KernelTable:
        const char* isa

    const KernelTable* kernel_table(const char* isa)

cdef extern from "append.hpp" namespace "cpu_kernels" nogil:
    cdef cppclass TokenRows:
        uint8_t* data
        int64_t token_bytes
        int64_t head_bytes

    void write_tokens(const KernelTable&, const KvPool&, int layer, const int64_t* places, int64_t count, Type type,
                      const TokenRows& k, const TokenRows& v)
    void read_tokens(const KernelTable&, const KvPool&, int layer, const int64_t* places, int64_t count, Type type,
                     const TokenRows& k, const TokenRows& v)
    void copy_pages(const KvPool&, int layer_begin, int layer_end, const int32_t* source, const int32_t* to,
                    int64_t count)

cdef extern from "plan.hpp" namespace "cpu_kernels" nogil:
    cdef cppclass PrefixGroup:
        int begin
        int end
        int row_begin
        int row_end

    cdef cppclass PlanInput:
        const KvPool* pool
        int rows
        const int32_t* lengths
        const int32_t* table
        const int64_t* table_begin
        int q_heads
        Type query_type
        float scale
        float soft_cap
        int window
        int threads
        const PrefixGroup* groups
        int group_count
        const int32_t* group_rows
        const KernelTable* kernels
        Tuning tuning

    cdef cppclass LayerIo:
        int layer
        const uint8_t* q
        int64_t q_row_bytes
        uint8_t* out
        int64_t out_row_bytes
        float* lse
        int64_t lse_row
        const uint8_t* k
        const uint8_t* v
        int64_t k_row_bytes
        int64_t v_row_bytes

    cdef struct WorkCost:
        int64_t bytes
        int64_t tokens

    cdef cppclass CPlan "cpu_kernels::Plan":
        CPlan(const PlanInput&) except +
        int items()
        int workers()
        int units()
        int partials()
        WorkCost item_cost(int item)
        int item_units(int item)
        int unit_rows(int item, int unit)
        int unit_tokens(int item, int unit)
        WorkCost total_cost()
        void run(const LayerIo&, int threads) except +
        cbool can_append()
        const KernelTable& kernels()
        const char* ran(int worker)

cdef extern from "plan_job.hpp" namespace "cpu_kernels" nogil:
    cdef cppclass CJob "cpu_kernels::Job":
        int items

    cdef cppclass PlanRun:
        CPlan* plan
        LayerIo io
        CJob job
        void make_job()


def features() -> dict[str, bool]:
    cdef Feature rows[64]
    cdef size_t count = detect_features(rows, 64)
    if count > 64:
        raise RuntimeError(f"the feature table has {count} rows, the buffer 64")
    return {rows[i].name.decode(): bool(rows[i].present) for i in range(count)}


def isas() -> list[tuple[str, str, tuple[str, ...]]]:
    cdef size_t count = 0
    cdef const Isa* table = isa_table(&count)
    return [
        (table[i].name.decode(), table[i].description.decode(),
         tuple(f for f in table[i].required.decode().split(",") if f))
        for i in range(count)
    ]


def has_kernels(isa: str) -> bool:
    """Whether this build holds kernels for the instruction set (not whether the machine can run them)."""
    cdef bytes name = isa.encode()
    return kernel_table(name) != NULL


def buffer_info(object data, bint writable):
    """(address, shape, strides in bytes, format, itemsize) of an object with the buffer protocol.

    Raises BufferError or TypeError if it has none, or is read-only and must not be. The caller keeps the object alive.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_STRIDES | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0))
    try:
        return (
            <uintptr_t>view.buf,
            tuple(view.shape[i] for i in range(view.ndim)),
            tuple(view.strides[i] for i in range(view.ndim)),
            view.format.decode() if view.format != NULL else "B",
            view.itemsize,
        )
    finally:
        PyBuffer_Release(&view)


cdef const KernelTable* _kernels(str isa) except NULL:
    cdef bytes name = isa.encode()
    cdef const KernelTable* table = kernel_table(name)
    if table == NULL:
        raise ValueError(f"this build has no kernels for the instruction set {isa!r}")
    return table


def page_offsets(int dtype, int page_tokens, int head_dim) -> tuple[int, int, int, int]:
    """Bytes from a page's start to its K scales, V, V scales, and its size."""
    cdef PageLayout layout
    layout.type = <Type>dtype
    layout.page_tokens = page_tokens
    layout.head_dim = head_dim
    return layout.k_scale_offset(), layout.v_offset(), layout.v_scale_offset(), layout.page_bytes()


cdef class Pool:
    """A view of keys and values in memory that the caller keeps alive."""

    cdef KvPool pool
    cdef vector[uint8_t*] k_layers
    cdef vector[uint8_t*] v_layers

    @staticmethod
    def paged(uintptr_t address, int layers, int64_t pages, int kv_heads, int head_dim, int dtype, int page_tokens):
        cdef Pool self = Pool.__new__(Pool)
        self.pool.layout.type = <Type>dtype
        self.pool.layout.page_tokens = page_tokens
        self.pool.layout.head_dim = head_dim
        self.pool.layers = layers
        self.pool.pages = pages
        self.pool.kv_heads = kv_heads
        self.pool.slots = False
        self.pool.base = <uint8_t*>address
        return self

    @staticmethod
    def token_major(list k, list v, int64_t slots, int kv_heads, int head_dim, int dtype, int64_t k_slot_bytes,
                    int64_t v_slot_bytes):
        cdef Pool self = Pool.__new__(Pool)
        for address in k:
            self.k_layers.push_back(<uint8_t*><uintptr_t>address)
        for address in v:
            self.v_layers.push_back(<uint8_t*><uintptr_t>address)
        self.pool.layout.type = <Type>dtype
        self.pool.layout.page_tokens = 1
        self.pool.layout.head_dim = head_dim
        self.pool.layers = <int>self.k_layers.size()
        self.pool.pages = slots
        self.pool.kv_heads = kv_heads
        self.pool.slots = True
        self.pool.k = self.k_layers.data()
        self.pool.v = self.v_layers.data()
        self.pool.k_slot_bytes = k_slot_bytes
        self.pool.v_slot_bytes = v_slot_bytes
        return self

    cdef int _check(self, int layer, const int64_t[::1] places) except -1:
        cdef int64_t i, limit = self.pool.pages * self.pool.layout.page_tokens
        if layer < 0 or layer >= self.pool.layers:
            raise IndexError(f"layer {layer} is outside the pool of {self.pool.layers}")
        for i in range(places.shape[0]):
            if places[i] < 0 or places[i] >= limit:
                raise IndexError(f"token {i}: place {places[i]} is outside the pool of {limit} tokens per layer")
        return 0

    def write(self, str isa, int layer, const int64_t[::1] places, int dtype, uintptr_t k, int64_t k_token,
              int64_t k_head, uintptr_t v, int64_t v_token, int64_t v_head):
        """Token i of the rows becomes token ``places[i]`` of the layer."""
        cdef const KernelTable* kernels = _kernels(isa)
        self._check(layer, places)
        cdef TokenRows k_rows, v_rows
        k_rows.data, k_rows.token_bytes, k_rows.head_bytes = <uint8_t*>k, k_token, k_head
        v_rows.data, v_rows.token_bytes, v_rows.head_bytes = <uint8_t*>v, v_token, v_head
        cdef int64_t count = places.shape[0]
        cdef const int64_t* at = &places[0] if count > 0 else NULL
        with nogil:
            write_tokens(kernels[0], self.pool, layer, at, count, <Type>dtype, k_rows, v_rows)

    def read(self, str isa, int layer, const int64_t[::1] places, int dtype, uintptr_t k, int64_t k_token,
             int64_t k_head, uintptr_t v, int64_t v_token, int64_t v_head):
        """The inverse of write."""
        cdef const KernelTable* kernels = _kernels(isa)
        self._check(layer, places)
        cdef TokenRows k_rows, v_rows
        k_rows.data, k_rows.token_bytes, k_rows.head_bytes = <uint8_t*>k, k_token, k_head
        v_rows.data, v_rows.token_bytes, v_rows.head_bytes = <uint8_t*>v, v_token, v_head
        cdef int64_t count = places.shape[0]
        cdef const int64_t* at = &places[0] if count > 0 else NULL
        with nogil:
            read_tokens(kernels[0], self.pool, layer, at, count, <Type>dtype, k_rows, v_rows)

    def copy(self, int layer_begin, int layer_end, const int32_t[::1] source, const int32_t[::1] target):
        cdef int64_t i
        if self.pool.slots:
            raise ValueError("a token-major pool has no pages to copy")
        if not 0 <= layer_begin <= layer_end <= self.pool.layers:
            raise IndexError(f"layers {layer_begin}..{layer_end} are outside the pool of {self.pool.layers}")
        if source.shape[0] != target.shape[0]:
            raise ValueError(f"{source.shape[0]} pages to copy from, {target.shape[0]} to copy to")
        for i in range(source.shape[0]):
            for page in (source[i], target[i]):
                if page < 0 or page >= self.pool.pages:
                    raise IndexError(f"page {page} is outside the pool of {self.pool.pages}")
        if source.shape[0] == 0:
            return
        with nogil:
            copy_pages(self.pool, layer_begin, layer_end, &source[0], &target[0], source.shape[0])


cdef class PlanHandle:
    """A plan of one step; see cpu_kernels.attention.Plan."""

    cdef unique_ptr[CPlan] plan
    cdef Pool pool
    cdef readonly str isa

    def __init__(self, Pool pool, str isa, const int32_t[::1] lengths, const int32_t[::1] table,
                 const int64_t[::1] table_begin, int q_heads, int query_type, float scale, float soft_cap, int window,
                 int threads, const int32_t[:, ::1] groups, const int32_t[::1] group_rows, dict tuning):
        cdef PlanInput given
        cdef vector[PrefixGroup] prefix
        cdef PrefixGroup group
        cdef int64_t i
        if table_begin.shape[0] != lengths.shape[0] + 1:
            raise ValueError(f"{lengths.shape[0]} rows need {lengths.shape[0] + 1} table offsets, "
                             f"got {table_begin.shape[0]}")
        for i in range(table_begin.shape[0]):
            if table_begin[i] < (table_begin[i - 1] if i > 0 else 0) or table_begin[i] > table.shape[0]:
                raise ValueError(f"table offsets must rise from 0 or more to at most {table.shape[0]}")
        for i in range(groups.shape[0]):
            group.begin, group.end, group.row_begin, group.row_end = (
                groups[i, 0], groups[i, 1], groups[i, 2], groups[i, 3])
            if not 0 <= group.row_begin <= group.row_end <= group_rows.shape[0]:
                raise ValueError(f"prefix group {i}: bad rows")
            prefix.push_back(group)
        given.pool = &pool.pool
        given.kernels = _kernels(isa)
        given.rows = <int>lengths.shape[0]
        given.lengths = &lengths[0] if lengths.shape[0] else NULL
        given.table = &table[0] if table.shape[0] else NULL
        given.table_begin = &table_begin[0]
        given.q_heads = q_heads
        given.query_type = <Type>query_type
        given.scale = scale
        given.soft_cap = soft_cap
        given.window = window
        given.threads = threads
        given.groups = prefix.data()
        given.group_count = <int>prefix.size()
        given.group_rows = &group_rows[0] if group_rows.shape[0] else NULL
        given.tuning.prefetch_hint = tuning["prefetch_hint"]
        given.tuning.prefetch_tiles = tuning["prefetch_tiles"]
        given.tuning.min_split_tokens = tuning["min_split_tokens"]
        given.tuning.min_thread_tokens = tuning["min_thread_tokens"]
        given.tuning.last_round_tokens = tuning["last_round_tokens"]
        given.tuning.prefix_min_rows = tuning["prefix_min_rows"]
        given.tuning.prefix_piece_kib = tuning["prefix_piece_kib"]
        given.tuning.held_tiles = tuning["held_tiles"]
        given.tuning.dot_min_queries = tuning["dot_min_queries"]
        given.tuning.tile_min_queries = tuning["tile_min_queries"]
        given.tuning.accurate_int8 = tuning["accurate_int8"]
        self.plan.reset(new CPlan(given))
        self.pool = pool
        self.isa = isa

    def jobs(self, const int32_t[::1] layers, tuple q, tuple out, tuple lse, tuple k, tuple v) -> PlanJobs:
        """One job per layer; of every array the address and the bytes from layer to layer and from row to row."""
        cdef Py_ssize_t i
        cdef LayerIo* io
        cdef PlanJobs jobs = PlanJobs.__new__(PlanJobs)
        if k[0] and not self.plan.get().can_append():
            raise ValueError("a row is empty or its last token is in a shared prefix: there is no place for a new k, v")
        for i in range(layers.shape[0]):
            if layers[i] < 0 or layers[i] >= self.pool.pool.layers:
                raise IndexError(f"layer {layers[i]} is outside the pool of {self.pool.pool.layers}")
        jobs.plan = self
        jobs.runs.resize(layers.shape[0])  # once: jobs refer to where they lie
        for i in range(layers.shape[0]):
            jobs.runs[i].plan = self.plan.get()
            io = &jobs.runs[i].io
            io.layer = layers[i]
            io.q, io.q_row_bytes = <const uint8_t*>_at(q, i), q[2]
            io.out, io.out_row_bytes = <uint8_t*>_at(out, i), out[2]
            io.lse, io.lse_row = <float*>_at(lse, i), lse[2] // sizeof(float)
            io.k, io.k_row_bytes = <const uint8_t*>_at(k, i), k[2]
            io.v, io.v_row_bytes = <const uint8_t*>_at(v, i), v[2]
            jobs.runs[i].make_job()
        return jobs

    @property
    def items(self) -> int:
        return self.plan.get().items()

    @property
    def workers(self) -> int:
        return self.plan.get().workers()

    @property
    def units(self) -> int:
        return self.plan.get().units()

    @property
    def partials(self) -> int:
        return self.plan.get().partials()

    @property
    def cost(self) -> tuple[int, int]:
        cdef WorkCost cost = self.plan.get().total_cost()
        return cost.bytes, cost.tokens

    @property
    def shares(self) -> list[list[tuple[int, int]]]:
        """Of every item, in the order in which workers take them, its runs of tokens: for how many rows, and tokens."""
        cdef int i, u
        cdef CPlan* plan = self.plan.get()
        return [
            [(plan.unit_rows(i, u), plan.unit_tokens(i, u)) for u in range(plan.item_units(i))]
            for i in range(self.items)
        ]

    def ran(self) -> set[str]:
        cdef const char* name
        names = set()
        for worker in range(self.plan.get().workers()):
            name = self.plan.get().ran(worker)
            if name != NULL:
                names.add(name.decode())
        return names


cdef uintptr_t _at(tuple array, Py_ssize_t layer) except? 0:
    cdef uintptr_t address = array[0]
    return address + layer * <Py_ssize_t>array[1] if address else 0


cdef class PlanJobs:
    """Runs of a plan, one per layer, as jobs of worker_pool.hpp. Must outlive them; keeps the plan alive."""

    cdef PlanHandle plan
    cdef vector[PlanRun] runs
    cdef public object keep  # the arrays

    def __len__(self):
        return self.runs.size()

    cdef PlanRun* run_at(self, index) except NULL:
        if not 0 <= index < <Py_ssize_t>self.runs.size():
            raise IndexError(f"job {index} of {self.runs.size()}")
        return &self.runs[<size_t>index]

    def address(self, index) -> int:
        """Of the ``cpu_kernels::Job`` with that index."""
        return <uintptr_t>&self.run_at(index).job

    def __getitem__(self, index) -> PlanJob:
        cdef PlanJob job = PlanJob.__new__(PlanJob)
        job.run_ = self.run_at(index)
        job.jobs = self
        return job


cdef class PlanJob:
    """One of them."""

    cdef PlanJobs jobs
    cdef PlanRun* run_

    @property
    def address(self) -> int:
        """Of the ``cpu_kernels::Job``."""
        return <uintptr_t>&self.run_.job

    def run(self, int threads):
        """Runs all items, on this thread and ``threads`` - 1 more that live for this call."""
        with nogil:
            self.run_.plan.run(self.run_.io, threads)
