/* JSON texts: where a value ends, and integers and times from decimal text.
 *
 * Every function returns the address after what it read, or NULL for anything that it does not know to be valid JSON:
 * such a text is read in Python. No function reads at or beyond `end`, and none recurses. */

#ifndef THENCE_JSON_H
#define THENCE_JSON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST_NESTED = 64, WORD = 8, HALF_WORD = 4 };

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint64_t Words2 __attribute__((vector_size(16)));

typedef struct {
    int escaped;   /* a string holds a backslash */
    int non_ascii; /* a string holds a byte that must be part of UTF-8 */
} Seen;

static inline const uint8_t *after_blanks(const uint8_t *at, const uint8_t *end) {
    if (at < end && *at > ' ') return at; /* mostly */
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

/* Whether the text at an address is one that was seen before it, of less than the bytes up to `end`. Its first 16 bytes
 * are compared without regard to its size, which no branch can foresee. */
static inline int is_again(const uint8_t *at, const uint8_t *end, const uint8_t *before, size_t size) {
    static const uint8_t ones_and_zeros[2 * sizeof(Words2)] = {255, 255, 255, 255, 255, 255, 255, 255,
                                                               255, 255, 255, 255, 255, 255, 255, 255};
    Words2 a, b, mask;
    if ((size_t)(end - at) < sizeof a) return same_bytes(at, before, size);
    size_t first = size < sizeof mask ? size : sizeof mask;
    memcpy(&a, at, sizeof a), memcpy(&b, before, sizeof b);
    memcpy(&mask, ones_and_zeros + sizeof mask - first, sizeof mask);
    a = (a ^ b) & mask;
    if (a[0] | a[1]) return 0;
    for (size_t done = sizeof a; done < size; done += sizeof a) {
        size_t place = size - done < sizeof a ? size - sizeof a : done; /* the last bytes, of which some were compared */
        memcpy(&a, at + place, sizeof a), memcpy(&b, before + place, sizeof b);
        a ^= b;
        if (a[0] | a[1]) return 0;
    }
    return 1;
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

/* How many of the next 8 bytes, all of which are read, are digits; their word with digits as 0 to 9, the first lowest. */
static inline int digits_ahead(const uint8_t *at, uint64_t *word) {
    memcpy(word, at, WORD);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    *word = __builtin_bswap64(*word);
#endif
    *word ^= 0x3030303030303030u; /* of all bytes but digits the sum below has its highest bit */
    uint64_t other = ((*word + 0x7676767676767676u) | *word) & 0x8080808080808080u;
    return other ? __builtin_ctzll(other) / 8 : WORD;
}

/* The digits among the next 8 bytes: their value, and how many there are. All 8 bytes are read. */
static inline int up_to_eight_digits(const uint8_t *at, uint64_t *value) {
    uint64_t word;
    int digits = digits_ahead(at, &word);
    if (!digits) return 0;
    word <<= 8 * (WORD - digits);   /* zeros in front instead of what follows */
    word = word * 10 + (word >> 8); /* pairs, then all four of them at once */
    *value = ((word & 0x000000FF000000FFu) * 0x000F424000000064u +
              (word >> 16 & 0x000000FF000000FFu) * 0x0000271000000001u) >> 32;
    return digits;
}

static const uint8_t *after_digits(const uint8_t *at, const uint8_t *end) {
    const uint8_t *first = at;
    uint64_t word;
    if (end - at >= WORD) at += digits_ahead(at, &word);
    while (is_digit(at, end)) at++;
    return at == first ? NULL : at;
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

static const uint64_t powers_of_ten[WORD + 1] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};

/* The digits among the next 16 bytes, all of which are read. */
static inline int up_to_sixteen_digits(const uint8_t *at, uint64_t *value) {
    uint64_t more = 0;
    int digits = up_to_eight_digits(at, value), further;
    if (digits < WORD) return digits;
    further = up_to_eight_digits(at + WORD, &more);
    *value = *value * powers_of_ten[further] + more;
    return digits + further;
}

/* Digits without a needless zero in front, as an integer; they must not be followed by a fraction or an exponent. */
static inline const uint8_t *unsigned_integer(const uint8_t *at, const uint8_t *end, uint64_t *value) {
    const uint8_t *first = at;
    uint64_t sum = 0;
    if (end - at >= 2 * WORD) at += up_to_sixteen_digits(at, &sum);
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
static const uint8_t *any_nanoseconds(const uint8_t *at, const uint8_t *end, int64_t *value) {
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

/* The same, faster for what is mostly written: at most 15 digits, a point, and at most three digits. */
static inline const uint8_t *nanoseconds(const uint8_t *at, const uint8_t *end, int64_t *value) {
    uint64_t sum = 0, rest = 0;
    if (end - at < 3 * WORD + 1) return any_nanoseconds(at, end, value);
    int digits = up_to_sixteen_digits(at, &sum), decimals;
    const uint8_t *point = at + digits, *after;
    if (!digits || digits > 15 || *at == '0' || *point != '.') return any_nanoseconds(at, end, value);
    decimals = up_to_eight_digits(point + 1, &rest);
    after = point + 1 + decimals;
    if (!decimals || decimals > 3 || (*after | 0x20) == 'e') return any_nanoseconds(at, end, value);
    *value = (int64_t)(sum * 1000 + rest * powers_of_ten[3 - decimals]);
    return after;
}

#endif
