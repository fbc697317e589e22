// Lookups, gradients and steps of a shared array, with any offsets, ids, features and layout.
#include "shared_lookup/cpu.cpp"

#include "fuzz.h"

namespace {

void look_up(fuzz::Feed& feed) {
  recmill::forced.is_portable = feed.below(2);
  recmill::forced.threads = 1 + static_cast<int>(feed.below(2));
  const int64_t num_features = feed.below(4), num_samples = feed.below(8), num_ids = feed.below(40);
  const int64_t size = feed.mostly_up_to(200), block = feed.below(4) ? 8 << feed.below(3) : feed.mostly_up_to(40);
  const int64_t num_exact = feed.below(8), width = feed.below(100) + 1;
  const bool is_pooled = feed.below(2);
  fuzz::Held<int64_t> ids(num_ids), exact(num_exact), features(num_features, 8);
  for (int64_t i = 0; i < num_ids; ++i) ids[i] = feed.mostly_up_to(20);
  for (int64_t i = 0; i < num_exact; ++i) exact[i] = feed.below(8) ? 2 * i : feed.mostly_up_to(20);
  for (int64_t f = 0; f < num_features; ++f) {
    int64_t* row = features.get() + 8 * f;
    row[0] = feed.number<int64_t>();                                      // key
    row[1] = feed.below(4) ? 8 << feed.below(3) : feed.mostly_up_to(40);  // dim
    row[2] = feed.below(2);                                               // mean
    row[3] = feed.mostly_up_to(32);                                       // column
    row[4] = feed.below(2) ? 0 : feed.mostly_up_to(num_exact);            // first exact id
    row[5] = feed.below(2) ? 0 : feed.mostly_up_to(num_exact);            // exact ids
    row[6] = feed.below(2) ? size : feed.mostly_up_to(200);               // where their rows begin
    row[7] = feed.below(2) ? 8 : feed.mostly_up_to(16);                   // weights per exact row
  }
  fuzz::Held<int64_t> offsets = fuzz::offsets_of(feed, num_features * num_samples, num_ids);
  const recmill::SharedLists lists(ids.in(), offsets.in(), features.in(), exact.in(), {size, block}, width, is_pooled);
  fuzz::must(lists.num_out() <= 1 << 20, "more output than ids");
  // A layout may ask for more slots than the array has: every call refuses that.
  const int64_t num_slots = std::min<int64_t>(size, 300) + 8 * feed.below(40), num_lines = (num_slots + 15) / 16;
  fuzz::Held<float> array(num_slots), gradient(num_slots), out(lists.num_out());
  fuzz::Held<int8_t> codes(num_slots), exponents(num_lines);
  fuzz::Held<uint8_t> touched(num_lines);
  for (int64_t i = 0; i < num_slots; ++i) {
    array[i] = 1.0f;
    codes[i] = static_cast<int8_t>(i % 100);
  }
  for (int64_t line = 0; line < num_lines; ++line) exponents[line] = feed.number<int8_t>();
  recmill::OptionalInput no_exponents, packed = exponents.in();
  recmill::shared_lookup(lists, array.in(), no_exponents, out.out());
  recmill::shared_lookup(lists, codes.in(), packed, out.out());
  for (int64_t i = 0; i < out.size(); ++i) out[i] = 1.0f;
  recmill::OptionalOutput marks = touched.out(), scales;
  recmill::shared_scatter(lists, gradient.out(), out.in(), marks, 1.0);
  for (int64_t i = 0; i < num_slots; ++i)
    fuzz::must(gradient[i] == 0.0f || touched[i / 16] == 1, "a slot has a gradient, its line is not touched");
  const int64_t kinds[] = {0, num_slots, num_lines, feed.below(60)};
  fuzz::Held<float> momentum(kinds[feed.below(4)]);
  if (feed.below(2)) scales = exponents.out();
  recmill::shared_step(scales ? codes.out() : array.out(), scales, momentum.out(), gradient.out(), touched.out(), 0.1,
                       1e-8, feed.number<int64_t>());
}

}  // namespace

FUZZ(look_up)
