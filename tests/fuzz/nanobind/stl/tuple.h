#pragma once

#include <tuple>
