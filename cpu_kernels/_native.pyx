# cython: language_level=3
"""The compiled half of cpu_kernels: thin, validated calls into C++."""

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
