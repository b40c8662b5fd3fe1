/* JSON texts: where a value ends, and integers and times from decimal text.
 *
 * Every function returns the address after what it read, or NULL for anything that it does not know to be valid JSON:
 * such a text is read in Python. No function reads at or beyond `end`, and none recurses. */

#ifndef THENCE_JSON_H
#define THENCE_JSON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST_NESTED = 64, WORD = 8, HALF_WORD = 4, SAFE_DIGITS = 19 };

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint64_t Words2 __attribute__((vector_size(16)));

typedef struct {
    int escaped;   /* a string holds a backslash */
    int non_ascii; /* a string holds a byte that must be part of UTF-8 */
} Seen;

static inline const uint8_t *after_blanks(const uint8_t *at, const uint8_t *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) at++;
    return at;
}

/* Whether two texts of a length are the same; most are short, for which calling memcmp takes longest. */
static inline int same_bytes(const uint8_t *one, const uint8_t *other, size_t size) {
    if (size > 2 * sizeof(Words2)) return !memcmp(one, other, size);
    if (size >= sizeof(Words2)) { /* the first bytes and the last ones, which may overlap */
        Words2 a, b, c, d;
        memcpy(&a, one, sizeof a), memcpy(&b, other, sizeof b);
        memcpy(&c, one + size - sizeof c, sizeof c), memcpy(&d, other + size - sizeof d, sizeof d);
        a = (a ^ b) | (c ^ d);
        return !(a[0] | a[1]);
    }
    uint64_t a = 0, b = 0, c = 0, d = 0;
    if (size >= WORD) {
        memcpy(&a, one, WORD), memcpy(&b, other, WORD);
        memcpy(&c, one + size - WORD, WORD), memcpy(&d, other + size - WORD, WORD);
    } else if (size >= HALF_WORD) {
        memcpy(&a, one, HALF_WORD), memcpy(&b, other, HALF_WORD);
        memcpy(&c, one + size - HALF_WORD, HALF_WORD), memcpy(&d, other + size - HALF_WORD, HALF_WORD);
    } else
        for (size_t i = 0; i < size; i++) a |= one[i] ^ other[i];
    return a == b && c == d;
}

static inline int is_digit(const uint8_t *at, const uint8_t *end) { return at < end && *at >= '0' && *at <= '9'; }

static inline int is_plain(uint8_t byte) { return byte != '"' && byte != '\\' && byte >= 0x20 && byte < 0x80; }

/* How many bytes of a word, which is not 0, are 0 before the first one that is not. */
static inline int zero_bytes(uint64_t word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_clzll(word) / 8;
#else
    return __builtin_ctzll(word) / 8;
#endif
}

/* The first byte that is not plain, or `end`. */
static inline const uint8_t *after_plain(const uint8_t *at, const uint8_t *end) {
    while (end - at >= (ptrdiff_t)sizeof(Bytes16)) {
        Bytes16 bytes;
        memcpy(&bytes, at, sizeof bytes);
        Words2 other = (Words2)((bytes == '"') | (bytes == '\\') | (bytes < 0x20) | (bytes >= 0x80));
        if (other[0]) return at + zero_bytes(other[0]);
        if (other[1]) return at + WORD + zero_bytes(other[1]);
        at += sizeof bytes;
    }
    while (at < end && is_plain(*at)) at++;
    return at;
}

/* An escape sequence, from its backslash. Halves of surrogate pairs are left to Python. */
static const uint8_t *after_escape(const uint8_t *at, const uint8_t *end) {
    if (end - at < 2) return NULL;
    if (memchr("\"\\/bfnrt", at[1], 8)) return at + 2;
    if (at[1] != 'u' || end - at < 6) return NULL;
    for (int i = 2; i < 6; i++)
        if (!(is_digit(at + i, end) || ((at[i] | 0x20) >= 'a' && (at[i] | 0x20) <= 'f'))) return NULL;
    return (at[2] | 0x20) == 'd' && at[3] >= '8' ? NULL : at + 6;
}

/* A string, from its first quote. */
static inline const uint8_t *after_string(const uint8_t *at, const uint8_t *end, Seen *seen) {
    at++;
    for (;;) {
        at = after_plain(at, end);
        if (at == end) return NULL;
        if (*at == '"') return at + 1;
        if (*at >= 0x80) {
            seen->non_ascii = 1;
            at++;
        } else {
            seen->escaped = 1;
            if (*at != '\\' || !(at = after_escape(at, end))) return NULL;
        }
    }
}

static const uint8_t *after_digits(const uint8_t *at, const uint8_t *end) {
    if (!is_digit(at, end)) return NULL;
    while (is_digit(at, end)) at++;
    return at;
}

static const uint8_t *after_number(const uint8_t *at, const uint8_t *end) {
    if (at < end && *at == '-') at++;
    const uint8_t *first = at;
    if (!(at = after_digits(at, end)) || (*first == '0' && at - first > 1)) return NULL;
    if (at < end && *at == '.' && !(at = after_digits(at + 1, end))) return NULL;
    if (at < end && (*at | 0x20) == 'e') {
        at++;
        if (at < end && (*at == '+' || *at == '-')) at++;
        at = after_digits(at, end);
    }
    return at;
}

static const uint8_t *after_literal(const uint8_t *at, const uint8_t *end) {
    if (end - at >= 4 && (!memcmp(at, "true", 4) || !memcmp(at, "null", 4))) return at + 4;
    return end - at >= 5 && !memcmp(at, "false", 5) ? at + 5 : NULL;
}

/* A colon after a key, and the blanks around it. */
static inline const uint8_t *after_colon(const uint8_t *at, const uint8_t *end) {
    at = after_blanks(at, end);
    return at < end && *at == ':' ? after_blanks(at + 1, end) : NULL;
}

static inline const uint8_t *after_scalar(const uint8_t *at, const uint8_t *end, Seen *seen) {
    if (*at == '"') return after_string(at, end, seen);
    return *at == 't' || *at == 'f' || *at == 'n' ? after_literal(at, end) : after_number(at, end);
}

/* Any value. The bits of `objects` say which of the open brackets, the innermost last, are those of objects. */
static const uint8_t *after_value(const uint8_t *at, const uint8_t *end, Seen *seen) {
    uint64_t objects = 0;
    int depth = 0;
    for (;;) { /* at a value, or at a key within an object */
        if (at == end) return NULL;
        if (depth && (objects & 1)) {
            if (*at != '"' || !(at = after_string(at, end, seen)) || !(at = after_colon(at, end)) || at == end)
                return NULL;
        }
        if (*at == '[' || *at == '{') {
            if (depth++ == MOST_NESTED) return NULL;
            objects = objects << 1 | (*at == '{');
            at = after_blanks(at + 1, end);
            if (at == end) return NULL;
            if (*at != (objects & 1 ? '}' : ']')) continue;
        } else if (!(at = after_scalar(at, end, seen))) return NULL;
        for (;;) { /* after a value, or at the bracket that closes an empty one */
            if (!depth) return at;
            at = after_blanks(at, end);
            if (at == end) return NULL;
            if (*at == ',') break;
            if (*at++ != (objects & 1 ? '}' : ']')) return NULL;
            objects >>= 1;
            depth--;
        }
        at = after_blanks(at + 1, end);
    }
}

/* Digits without a needless zero in front, as an integer; they must not be followed by a fraction or an exponent. */
static inline const uint8_t *unsigned_integer(const uint8_t *at, const uint8_t *end, uint64_t *value) {
    const uint8_t *first = at, *safe = end - at > SAFE_DIGITS ? at + SAFE_DIGITS : end;
    uint64_t sum = 0;
    for (; is_digit(at, safe); at++) sum = sum * 10 + (*at - '0');
    for (; is_digit(at, end); at++)
        if (__builtin_mul_overflow(sum, 10, &sum) || __builtin_add_overflow(sum, *at - '0', &sum)) return NULL;
    if (at == first || (*first == '0' && at - first > 1)) return NULL;
    *value = sum;
    return at < end && (*at == '.' || (*at | 0x20) == 'e') ? NULL : at;
}

static inline const uint8_t *signed_integer(const uint8_t *at, const uint8_t *end, int64_t *value) {
    int negative = at < end && *at == '-';
    uint64_t sum;
    at = unsigned_integer(at + negative, end, &sum);
    if (!at || sum > INT64_MAX) return NULL;
    *value = negative ? -(int64_t)sum : (int64_t)sum;
    return at;
}

/* Microseconds as nanoseconds, rounded half to even, as `thence.readers.kineto.times` does; of at most 18 digits. */
static const uint8_t *nanoseconds(const uint8_t *at, const uint8_t *end, int64_t *value) {
    int negative = at < end && *at == '-', digits = 0, decimals = 0;
    at += negative;
    const uint8_t *first = at;
    int64_t sum = 0, rest = 0, unit = 1;
    for (; is_digit(at, end); at++, digits++) {
        if (digits == 15) return NULL;
        sum = sum * 10 + (*at - '0');
    }
    if (!digits || (*first == '0' && digits > 1)) return NULL;
    if (at < end && *at == '.') {
        for (at++; is_digit(at, end); at++, digits++, decimals++) {
            if (digits == 18) return NULL;
            if (decimals < 3) sum = sum * 10 + (*at - '0');
            else rest = rest * 10 + (*at - '0'), unit *= 10;
        }
        if (!decimals) return NULL;
    }
    if (at < end && (*at | 0x20) == 'e') return NULL;
    for (; decimals < 3; decimals++) sum *= 10;
    if (2 * rest > unit || (2 * rest == unit && (sum & 1))) sum++;
    *value = negative ? -sum : sum;
    return at;
}

#endif
