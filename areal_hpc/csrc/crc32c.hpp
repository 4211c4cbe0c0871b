// CRC32C (Castagnoli, RFC 3720 appendix B.4; reflected polynomial 0x82f63b78), with the processor's instruction where there is one.
//
// The instruction takes 8 bytes a cycle but its result comes three cycles later, so long buffers are cut into three streams that run
// interleaved. Their sums are joined by the linear operator "append L zero bytes" (multiplication by x^8L modulo the polynomial), kept as
// tables: Mark Adler's scheme.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace areal_hpc {

inline constexpr uint32_t kCrc32cPolynomial = 0x82f63b78u;

namespace crc_detail {

using Table = std::array<std::array<uint32_t, 256>, 8>;

// Table k: the register after one byte followed by k zero bytes.
constexpr Table make_byte_tables() {
  Table table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ kCrc32cPolynomial : crc >> 1;
    table[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (size_t k = 1; k < 8; ++k) table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 0xff];
  }
  return table;
}

inline constexpr Table kByteTables = make_byte_tables();

inline uint64_t load_u64(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// Register after `num_bytes` bytes, eight a step, on any processor.
inline uint32_t update_table(uint32_t crc, const uint8_t* data, size_t num_bytes) {
  const Table& t = kByteTables;
  for (; num_bytes >= 8; num_bytes -= 8, data += 8) {
    const uint64_t w = load_u64(data) ^ crc;
    crc = t[7][w & 0xff] ^ t[6][(w >> 8) & 0xff] ^ t[5][(w >> 16) & 0xff] ^ t[4][(w >> 24) & 0xff] ^ t[3][(w >> 32) & 0xff] ^
          t[2][(w >> 40) & 0xff] ^ t[1][(w >> 48) & 0xff] ^ t[0][w >> 56];
  }
  for (; num_bytes > 0; --num_bytes, ++data) crc = (crc >> 8) ^ t[0][(crc ^ *data) & 0xff];
  return crc;
}

// a * b modulo the polynomial; bit 31 is x^0.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kCrc32cPolynomial : b >> 1;
  }
  return product;
}

// The operator "append 2^log2_bytes zero bytes", as four tables of 256.
struct ZerosOperator {
  std::array<std::array<uint32_t, 256>, 4> table{};
  explicit ZerosOperator(int log2_bytes) {
    uint32_t power = 1u << 30;                                                // x^1
    for (int i = 0; i < log2_bytes + 3; ++i) power = multiply(power, power);  // x^(8 * bytes)
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (int k = 0; k < 4; ++k) table[k][byte] = multiply(power, byte << (8 * k));
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return table[0][crc & 0xff] ^ table[1][(crc >> 8) & 0xff] ^ table[2][(crc >> 16) & 0xff] ^ table[3][crc >> 24];
  }
};

#if defined(__x86_64__)
#define AREAL_HPC_CRC_TARGET __attribute__((target("sse4.2")))
inline AREAL_HPC_CRC_TARGET uint32_t step8(uint32_t crc, const uint8_t* data) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, load_u64(data)));
}
inline AREAL_HPC_CRC_TARGET uint32_t step1(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
inline bool have_instruction() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__)
#define AREAL_HPC_CRC_TARGET __attribute__((target("+crc")))
inline AREAL_HPC_CRC_TARGET uint32_t step8(uint32_t crc, const uint8_t* data) { return __crc32cd(crc, load_u64(data)); }
inline AREAL_HPC_CRC_TARGET uint32_t step1(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
inline bool have_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

#if defined(AREAL_HPC_CRC_TARGET)
// Three streams of 2^LOG2_BYTES bytes each, as often as they fit.
template <int LOG2_BYTES>
AREAL_HPC_CRC_TARGET inline uint32_t update_three_streams(uint32_t crc, const uint8_t*& data, size_t& num_bytes) {
  constexpr size_t stream = size_t{1} << LOG2_BYTES;
  static const ZerosOperator append_stream(LOG2_BYTES);
  for (; num_bytes >= 3 * stream; num_bytes -= 3 * stream, data += 3 * stream) {
    uint32_t second = 0, third = 0;
    for (size_t i = 0; i < stream; i += 8) {
      crc = step8(crc, data + i);
      second = step8(second, data + stream + i);
      third = step8(third, data + 2 * stream + i);
    }
    crc = append_stream(append_stream(crc) ^ second) ^ third;
  }
  return crc;
}

AREAL_HPC_CRC_TARGET inline uint32_t update_instruction(uint32_t crc, const uint8_t* data, size_t num_bytes) {
  if (num_bytes >= 768) {
    crc = update_three_streams<12>(crc, data, num_bytes);
    crc = update_three_streams<8>(crc, data, num_bytes);
  }
  for (; num_bytes >= 8; num_bytes -= 8, data += 8) crc = step8(crc, data);
  for (; num_bytes > 0; --num_bytes, ++data) crc = step1(crc, *data);
  return crc;
}
#else
inline bool have_instruction() { return false; }
inline uint32_t update_instruction(uint32_t crc, const uint8_t* data, size_t num_bytes) { return update_table(crc, data, num_bytes); }
#endif

}  // namespace crc_detail

// Checksum of `num_bytes` bytes that follow bytes of checksum `seed` (0: none): crc32c(ab) == crc32c(b, crc32c(a)).
inline uint32_t crc32c(const void* data, size_t num_bytes, uint32_t seed = 0) {
  static const bool instruction = crc_detail::have_instruction();
  const auto* bytes = static_cast<const uint8_t*>(data);
  return ~(instruction ? crc_detail::update_instruction(~seed, bytes, num_bytes) : crc_detail::update_table(~seed, bytes, num_bytes));
}

}  // namespace areal_hpc
