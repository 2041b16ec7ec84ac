// The body of every file in isa/: the templates for its `Isa`, behind one table of functions.

#include "attend.hpp"
#include "decode.hpp"
#include "encode.hpp"
#include "hadamard.hpp"
#include "kernels.hpp"

namespace kvbits {

extern const Kernels KVBITS_EXPORT = {
    Isa::name, Isa::supported, Scratch::bytes, value_width, packed_query<Isa>, attend<Isa>, merge<Isa>, decode_block<Isa>, decode_scratch<Isa>,
    encode_block<Isa>, encode_scratch<Isa>, hadamard_block<Isa>, hadamard_scratch,
};

}  // namespace kvbits
