// Random calls against attention in double precision, for every instruction set, and random blocks through every
// encoder, which must agree to the bit. Meant to run under sanitizers: each array is allocated to the byte, so that a
// read beyond it is found.
//
//   fuzz [seconds [seed]]
#include <chrono>
#include <cstdlib>

#include "random_encoder.hpp"
#include "truth.hpp"

using namespace kvbits;

namespace {

constexpr double TOLERANCE = 1e-3;  // of the largest output, and of a log-sum

// The largest error of one instruction set, relative to the largest output; infinite for NaN and for a wrong log-sum.
double compare(RandomJob& random, const Truth& truth, const Kernels& kernels) {
    Job& job = random.job;
    Tensor out;
    out.make(Type::f32, {job.batch, random.query_heads(), job.queries, job.record.value.channels}, false);
    std::vector<float> log_sums(truth.log_sums.size(), NAN);
    job.output = out.array;
    job.log_sums = log_sums.data();
    attend(job, kernels, any(1, 3));
    job.log_sums = nullptr;
    double largest = 1e-3, worst = 0;
    for (const double x : truth.outputs) largest = std::fabs(x) > largest ? std::fabs(x) : largest;
    for (size_t n = 0; n < truth.log_sums.size(); ++n) {
        if (std::isinf(truth.log_sums[n]) && std::isinf(log_sums[n])) continue;
        const double error = std::fabs(log_sums[n] - truth.log_sums[n]) / std::fmax(1, std::fabs(truth.log_sums[n]));
        if (std::isnan(error) || error > TOLERANCE) worst = INFINITY;
    }
    for (size_t n = 0; n < truth.outputs.size(); ++n) {
        const double error = std::fabs(get(out.memory.data() + 4 * n, Type::f32) - truth.outputs[n]) / largest;
        worst = std::isnan(error) ? INFINITY : error >= worst ? error : worst;
    }
    return worst;
}

void describe(const Job& job, const Kernels& kernels, double error) {
    const Side &k = job.record.key, &v = job.record.value;
    std::printf("%s: error %.2e; %d tokens, keys %d bits, levels %d, per %d, D %d; values %d bits, levels %d, per %d, D %d; rows %d\n",
                kernels.name, error, job.record.tokens, k.bits, int(k.levels), int(k.per), k.channels, v.bits, int(v.levels), int(v.per),
                v.channels, job.rows());
}

}  // namespace

int main(int count, char** arguments) {
    const double seconds = count > 1 ? std::atof(arguments[1]) : 5;
    const uint64_t first = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
    const auto start = std::chrono::steady_clock::now();
    double worst = 0;
    uint64_t seed = first;
    for (; std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds; ++seed) {
        generator.seed(seed);
        RandomJob random;
        const Truth truth(random);
        double error = 0;
        for (const Kernels* kernels : all_kernels()) {
            const double here = compare(random, truth, *kernels);
            if (here > TOLERANCE) describe(random.job, *kernels, here);
            error = here > error ? here : error;
        }
        worst = error > worst ? error : worst;
        bool alike = true;
        for (int i = 0; i < 5; ++i) alike = encoded_alike() && alike;
        if (error > TOLERANCE || !truth.decoded_alike || !alike) {
            std::printf("seed %llu: error %.2e%s%s\n", static_cast<unsigned long long>(seed), error,
                        truth.decoded_alike ? "" : ", decoded differently", alike ? "" : ", encoded differently");
            return 1;
        }
    }
    std::printf("%llu calls,", static_cast<unsigned long long>(seed - first));
    for (const Kernels* kernels : all_kernels()) std::printf(" %s", kernels->name);
    std::printf(": worst error %.2e of the largest output\n", worst);
    return 0;
}
