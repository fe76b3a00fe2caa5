// Coefficients of cosine and sine of at most an eighth of a turn, those of phasor/angles.py to the bit:
// cos(pi/4 x) = 1 + y C(y) and sin(pi/4 x) = x S(y) with y = x * x, the lowest power first.
#pragma once

namespace phasor {

template <class C> struct Polynomials;

template <> struct Polynomials<float> {
  static constexpr float cos[] = {-0x1.3bd3ccp-2f, 0x1.03c1eap-6f, -0x1.55cb98p-12f, 0x1.db6492p-19f};
  static constexpr float sin[] = {0x1.921fb6p-1f, -0x1.4abbbap-4f, 0x1.465ec4p-9f, -0x1.2d9b4p-15f};
};
template <> struct Polynomials<double> {
  static constexpr double cos[] = {
      -0x1.3bd3cc9be45dep-2, 0x1.03c1f081b5acp-6,   -0x1.55d3c7e3cb241p-12, 0x1.e1f5068688d5bp-19,
      -0x1.a6d1eef479be1p-26, 0x1.f9ce245cada0bp-34, -0x1.b2f3eb054afcdp-42};
  static constexpr double sin[] = {
      0x1.921fb54442d18p-1,  -0x1.4abbce625be41p-4,  0x1.466bc677587f8p-9, -0x1.32d2cce2e5b19p-15,
      0x1.50782fda12d96p-22, -0x1.e30071afc3e59p-30, 0x1.e3f38399551bfp-38};
};

} // namespace phasor
