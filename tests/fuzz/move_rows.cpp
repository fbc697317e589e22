// Rows copied between matrices and compared, with any rows and any number of them.
#include "move_rows/cpu.cpp"

#include "fuzz.h"

namespace {

// Rows of a matrix, mostly; or none: the first ones.
struct Chosen {
  Chosen(fuzz::Feed& feed, int64_t count, int64_t num_rows) : rows(count) {
    for (int64_t n = 0; n < count; ++n) rows[n] = feed.mostly_up_to(num_rows ? num_rows - 1 : 0);
    if (feed.below(4)) given = rows.in();
  }
  int64_t at(int64_t n) { return given ? rows[n] : n; }

  fuzz::Held<int64_t> rows;
  recmill::OptionalInput given;
};

void move(fuzz::Feed& feed) {
  recmill::forced.threads = 1 + static_cast<int>(feed.below(3));
  const int64_t from_rows = feed.below(20), to_rows = feed.below(20);
  const int64_t width = 1 + feed.below(20), listed = feed.below(24);
  const int64_t count = feed.below(16) ? listed : feed.mostly_up_to(24);
  fuzz::Held<float> from(from_rows, width), to(to_rows, feed.below(16) ? width : 1 + feed.below(20));
  for (int64_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i + 1);
  Chosen source(feed, listed, from_rows), target(feed, listed, to_rows);
  const bool once = !target.given && recmill::forced.threads == 1;  // no row is written twice
  try {
    recmill::move_rows(from.out(), to.out(), source.given, target.given, count);
    for (int64_t n = 0; once && n < count; ++n)
      for (int64_t i = 0; i < width; ++i)
        fuzz::must(to[target.at(n) * width + i] == from[source.at(n) * width + i], "a row was not copied");
  } catch (const std::invalid_argument&) {
  }
  fuzz::Held<int64_t> found(listed);
  const int64_t changed = recmill::find_changed({from.out()}, {to.out()}, source.given, target.given, found.out());
  fuzz::must(changed >= 0 && changed <= listed, "more rows differ than were compared");
  for (int64_t k = 0; k < changed; ++k) fuzz::must(found[k] >= 0 && found[k] < listed, "a place that was not compared");
}

}  // namespace

FUZZ(move)
