// The sparse part of one block, and the dense part around it: bits as those of codecs/grouped.py.
#pragma once

#include "block.hpp"
#include "outliers.hpp"

namespace kvbits {
namespace {

template <class I, Type type, Levels levels> class SparseEncoder {
    using E = Elements<I, type>;
    using Dense = BlockEncoder<I, type, levels>;

    const Encoder& how_;
    const uint8_t* data_;
    const int64_t stride_, size_;
    const Statics statics_;
    const Encoded out_;
    float *x_, *far_, *work_;   // the block; how far its elements are out; for largest_places()
    uint8_t *inliers_, *rest_;  // the block with outliers replaced; scratch of the dense encoder

public:
    static int64_t scratch_bytes(const Encoder& how) {
        const int64_t size = how.tokens * how.channels;
        return 4 * (4 * size + 64) + size * E::size + 64 + Dense::scratch_bytes(how) + 64;
    }

    SparseEncoder(const Encoder& how, const uint8_t* data, int64_t stride, const Statics& statics, const Encoded& out, uint8_t* scratch)
        : how_(how), data_(data), stride_(stride), size_(how.tokens * how.channels), statics_(statics), out_(out) {
        auto take = [&](int64_t bytes) {
            scratch = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
            uint8_t* here = scratch;
            scratch += bytes;
            return here;
        };
        x_ = reinterpret_cast<float*>(take(4 * size_));
        far_ = reinterpret_cast<float*>(take(4 * size_));
        work_ = reinterpret_cast<float*>(take(8 * size_));
        inliers_ = take(size_ * E::size);
        rest_ = take(0);
    }

    bool run() {
        for (int64_t t = 0; t < how_.tokens; ++t) to_float<I>(type, data_ + t * stride_, how_.channels, x_ + t * how_.channels);
        if (how_.choice == Choice::fixed) {  // what decodes worst
            Dense dense(how_, data_, stride_, statics_, out_, rest_);
            const bool sound = dense.run();
            dense.pack();
            if (!sound) return false;
            miss(dense);
            largest_places(far_, size_, how_.outliers, work_, out_.outlier_index);
            write_values(dense);
            return true;
        }
        bool sound = true;
        for (int64_t i = 0; i < size_; ++i) sound &= std::fabs(x_[i]) <= how_.limit;  // nor is NaN
        if (!sound) return false;
        measure();
        largest_places(far_, size_, how_.outliers, work_, out_.outlier_index);
        replace();
        Dense dense(how_, inliers_, how_.channels * E::size, statics_, out_, rest_);
        dense.run();
        for (int e = 0; e < how_.outliers; ++e) recode(dense, out_.outlier_index[e]);
        dense.pack();
        write_values(dense);
        return true;
    }

private:
    // How much the dense part misses of each element, under static scales.
    KVBITS_STAGE void miss(const Dense& dense) {
        const int64_t channels = how_.channels;
        for (int64_t t = 0; t < how_.tokens; ++t) {
            const uint8_t* code = dense.code_at(t, 0);
            const float* x = x_ + t * channels;
            float* far = far_ + t * channels;
            for (int64_t c = 0; c < channels; ++c) {
                const float level = levels == Levels::table ? how_.table[code[c]] : float(code[c]);
                far[c] = std::fabs(x[c] - (level - statics_.zero[c]) * statics_.scale[c]);
            }
        }
    }

    KVBITS_STAGE void measure() {
        const int64_t channels = how_.channels, length = how_.length;
        if (how_.per == Per::channel)
            for (int64_t t = 0; t < how_.tokens; t += length) channel_distances(x_ + t * channels, length, channels, far_ + t * channels);
        else
            for (int64_t t = 0; t < how_.tokens; ++t)
                for (int64_t c = 0; c < channels; c += length)
                    distances(x_ + t * channels + c, channels - c < length ? channels - c : length, far_ + t * channels + c);
    }

    // Outliers give way to another element of their group, so that the others alone choose its range; to 0 where a
    // group has no others.
    KVBITS_STAGE void replace() {
        const int64_t channels = how_.channels;
        for (int64_t t = 0; t < how_.tokens; ++t) std::memcpy(inliers_ + t * channels * E::size, data_ + t * stride_, size_t(channels * E::size));
        for (int64_t i = 0; i < size_; ++i) work_[i] = 0;
        for (int e = 0; e < how_.outliers; ++e) work_[out_.outlier_index[e]] = 1;
        for (int e = 0; e < how_.outliers; ++e) {
            const int64_t i = out_.outlier_index[e], token = i / channels, channel = i % channels;
            const bool per_channel = how_.per == Per::channel;
            const int64_t step = per_channel ? channels : 1;
            const int64_t first = per_channel ? token / how_.length * how_.length * channels + channel : i - channel % how_.length;
            const int64_t row_end = channels - channel / how_.length * how_.length;
            const int64_t count = per_channel || row_end > how_.length ? how_.length : row_end;
            int64_t other = 0;
            while (other < count && work_[first + other * step] != 0) ++other;
            if (other < count) std::memcpy(inliers_ + i * E::size, inliers_ + (first + other * step) * E::size, E::size);
            else std::memset(inliers_ + i * E::size, 0, E::size);
        }
    }

    // The group of element i, in the arrays of scales and zeros.
    int64_t group_of(int64_t i) const {
        const int64_t token = i / how_.channels, channel = i % how_.channels;
        return how_.per == Per::channel ? token / how_.length * how_.channels + channel : token * how_.groups + channel / how_.length;
    }

    float scale(int64_t i) const {
        return how_.choice == Choice::fixed ? statics_.scale[i % how_.channels] : bf16_to_float(out_.scale[group_of(i)]);
    }

    float zero(int64_t i) const {
        return how_.choice == Choice::fixed ? statics_.zero[i % how_.channels] : half_to_float(out_.zero[group_of(i)]);
    }

    void recode(const Dense& dense, int64_t i) const {
        const float s = scale(i), level = x_[i] / (s == 0 ? 1.0f : s) + zero(i);
        const int top = (1 << how_.bits) - 1;
        int code = 0;
        if (levels == Levels::table) while (code < top && level > how_.edges[code]) ++code;
        else code = level > float(top) ? top : level > 0 ? int(__builtin_rintf(level)) : 0;
        *dense.code_at(i / how_.channels, i % how_.channels) = uint8_t(code);
    }

    float decoded(const Dense& dense, int64_t i) const {
        const uint8_t code = *dense.code_at(i / how_.channels, i % how_.channels);
        return ((levels == Levels::table ? how_.table[code] : float(code)) - zero(i)) * scale(i);
    }

    void write_values(const Dense& dense) const {
        for (int e = 0; e < how_.outliers; ++e) {
            const int64_t i = out_.outlier_index[e];
            out_.outlier_value[e] = float_to_bf16(x_[i] - decoded(dense, i));
        }
    }
};

}  // namespace
}  // namespace kvbits
