// What an instruction set offers: the functions of one file in isa/.
#pragma once

#include "encoder.hpp"
#include "job.hpp"

namespace kvbits {

// A range of blocks, or of exact tokens, of one row of the batch and one KV head.
struct Span {
    int batch, head;
    bool packed;
    int first, last;
    int slot;  // which of the partials of its row and head it fills
};

struct Kernels {
    const char* name;
    bool (*supported)();
    int64_t (*scratch_bytes)(const Job&);
    int (*value_width)(const Job&);
    // The query rows of one row of the batch and KV head as they are multiplied with packed keys: padded(channels) floats each.
    void (*packed_query)(const Job&, int batch, int head, float* out);
    // `packed_query`: what that has written, or nothing.
    void (*attend)(const Job&, const Span&, const float* packed_query, Partial&, uint8_t* scratch);
    // Join the partials of one row and KV head, `packed` of them of packed tokens first, into the output.
    void (*merge)(const Job&, int batch, int head, Partial* partials, int count, int packed, uint8_t* scratch);
    // Decode one block of one side into `out`, [tokens] rows `stride` bytes apart.
    void (*decode)(const Side&, int tokens, const uint8_t* record, const float* fixed_scale, const float* fixed_zero,
                   Type type, uint8_t* out, int64_t stride, uint8_t* scratch);
    int64_t (*decode_scratch_bytes)(const Side&, int tokens);
    // Encode one block, [tokens] rows `stride` bytes apart; false where an element is unsound.
    bool (*encode)(const Encoder&, Type, const uint8_t* block, int64_t stride, const Statics&, const Encoded&, uint8_t* scratch);
    int64_t (*encode_scratch_bytes)(const Encoder&, Type);
    // Rotate one block of such rows into `out`, contiguous.
    void (*hadamard)(Type, const uint8_t* block, int64_t stride, int64_t tokens, int64_t channels, const float* signs, float* out,
                     uint8_t* scratch);
    int64_t (*hadamard_scratch_bytes)(int64_t channels);
};

// Best first; only those that this build has.
const std::vector<const Kernels*>& all_kernels();

}  // namespace kvbits
