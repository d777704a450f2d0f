/* Copies memory past the caches: stores that do not first read the line which they overwrite, and that push nothing else
 * out. A snapshot is far larger than any cache and is not read again by the process that takes it.
 *
 * The C library's memmove does the same from a size on that it derives from the cache which the processor reports. A
 * virtual machine of two processors may be told of the whole host's cache: memmove then copies 190 MB the slow way, and
 * the tensors of a model are smaller than that.
 *
 * Compiled by build_native.py where there is a C compiler; copying.py does without it. */
#include <emmintrin.h> /* SSE2: every x86-64 has it */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PAGE 4096
#define LINE 64

static inline void stream_line(char *to, const char *from)
{
    __m128i a = _mm_loadu_si128((const __m128i *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

/* Neither pointer has to be aligned; the ranges must not overlap. What was copied is seen by whoever is told after the
 * return. */
void steadyrun_stream(char *to, const char *from, size_t size)
{
    size_t head = (size_t)(-(uintptr_t)to % PAGE);

    if (head > size)
        head = size;
    memcpy(to, from, head);
    to += head;
    from += head;
    size -= head;
    /* Four pages side by side: the processor fetches ahead in each of them, and never across the end of one. */
    for (; size >= 4 * PAGE; size -= 4 * PAGE, to += 3 * PAGE, from += 3 * PAGE)
        for (size_t at = 0; at < PAGE; at += LINE, to += LINE, from += LINE) {
            stream_line(to, from);
            stream_line(to + PAGE, from + PAGE);
            stream_line(to + 2 * PAGE, from + 2 * PAGE);
            stream_line(to + 3 * PAGE, from + 3 * PAGE);
        }
    for (; size >= LINE; size -= LINE, to += LINE, from += LINE)
        stream_line(to, from);
    memcpy(to, from, size);
    _mm_sfence();
}
