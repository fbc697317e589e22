// A deterministic stand-in for libFuzzer, for compilers without it: TARGET [-runs=N] [-seed=S] [CORPUS...]
// Changes the files of the corpus at random, without feedback about the code that they reach.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

using Bytes = std::vector<uint8_t>;

static void change(Bytes& bytes, std::mt19937_64& random) {
  static constexpr uint8_t kEdges[] = {0, 1, 7, 8, 127, 128, 248, 249, 250, 254, 255};
  const size_t at = bytes.empty() ? 0 : random() % bytes.size();
  switch (random() % 6) {
    case 0:
      if (!bytes.empty()) bytes[at] ^= static_cast<uint8_t>(1 << random() % 8);
      break;
    case 1:
      if (!bytes.empty()) bytes[at] = kEdges[random() % sizeof kEdges];
      break;
    case 2:
      if (!bytes.empty()) bytes[at] = static_cast<uint8_t>(random());
      break;
    case 3:
      for (size_t count = random() % 8 + 1; count > 0; --count)
        bytes.insert(bytes.begin() + static_cast<int64_t>(at), static_cast<uint8_t>(random()));
      break;
    case 4:
      if (!bytes.empty()) bytes.erase(bytes.begin() + static_cast<int64_t>(at));
      break;
    default:
      if (!bytes.empty()) bytes.resize(at);
  }
}

int main(int count, char** arguments) {
  uint64_t runs = 10'000, seed = 1;
  std::vector<Bytes> corpus{{}};
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    if (word.rfind("-runs=", 0) == 0) runs = std::stoull(word.substr(6));
    else if (word.rfind("-seed=", 0) == 0) seed = std::stoull(word.substr(6));
    else if (word[0] == '-') continue;
    else if (std::filesystem::is_directory(word)) {
      for (const auto& entry : std::filesystem::directory_iterator(word)) {
        std::ifstream file(entry.path(), std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
      }
    }
  }
  std::mt19937_64 random(seed);
  for (uint64_t run = 0; run < runs; ++run) {
    Bytes bytes = corpus[random() % corpus.size()];
    if (bytes.empty())
      for (size_t size = random() % 512; size > 0; --size) bytes.push_back(static_cast<uint8_t>(random()));
    for (uint64_t changes = random() % 8; changes > 0; --changes) change(bytes, random);
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[bytes.size()]);  // no spare room behind it, and never null
    std::copy(bytes.begin(), bytes.end(), exact.get());
    LLVMFuzzerTestOneInput(exact.get(), bytes.size());
  }
  std::fprintf(stderr, "Done %llu runs in 0 second(s)\n", static_cast<unsigned long long>(runs));
}
